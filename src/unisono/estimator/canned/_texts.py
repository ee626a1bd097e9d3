"""The texts for arguments of canned estimators and heads, which `help()` shows.

Tests: tests/virtual/estimator/test_canned.py, tests/unit/estimator/test_heads.py.
"""

from unisono.estimator._docstrings import Texts

#: Of optimizers; the learning rate is added.
OPTIMIZER = "name, optimizer of Keras or of `tf.train`, or function that returns one; by name its rate is "

#: The texts for arguments of linear models.
LINEAR = {
    "feature_columns": "numeric, bucketized, categorical and indicator columns.",
    "sparse_combiner": '`"sum"`, `"mean"` or `"sqrtn"`; how the weights of the categories of a row are '
    "combined.",
}

_NETWORK = {
    "activation_fn": "function, or its name in Keras; the activation of the hidden layers.",
    "dropout": "number from 0 to 1; the rate of dropout after each hidden layer. None for none.",
    "feature_columns": "dense columns: numeric, bucketized, indicator and embedding columns.",
    "hidden_units": "sequence of whole numbers; the size of each hidden layer.",
}

#: Those of dense networks, of linear models, and of both.
TEXTS = Texts(
    {
        **{f"linear_{name}": text for name, text in LINEAR.items()},
        **{f"dnn_{name}": text for name, text in _NETWORK.items()},
        **LINEAR,
        **_NETWORK,
        "linear_optimizer": f"{OPTIMIZER}`min(0.005, 1 / sqrt(columns))`.",
        "dnn_optimizer": f"{OPTIMIZER}0.001.",
        "batch_norm": "bool; whether each hidden layer is normalized.",
        "config": "a `RunConfig`; None for one without arguments.",
        "eval_metrics": "dict of metrics that `metrics` returned.",
        "features": "dict of arrays by key.",
        "head": "`Head`, such as `MultiLabelHead(n_classes)`.",
        "keys": "sequence of strings; the predictions that are wanted. None for all.",
        "label_dimension": "whole number; how many numbers an example has.",
        "label_vocabulary": "sequence of strings; the names of the classes, where labels are strings.",
        "labels": "array of the labels of a batch, on the host.",
        "logits": "float array of shape `(batch, logits_dimension)`.",
        "loss_fn": "function of `labels` and `logits`, perhaps `features`, that returns a loss for each row, "
        "in place of the head's own.",
        "loss_reduction": '`"sum_over_batch_size"` or `"sum"`.',
        "model_dir": "path of the directory of checkpoints and event files; None for `config.model_dir`.",
        "n_classes": "whole number; how many classes there are.",
        "name": "string that is added to the names of metrics after a slash; None for none.",
        "predictions": "dict of NumPy arrays by key.",
        "regularization_losses": "sequence of numbers, the losses of regularizers; None for none.",
        "thresholds": "sequence of numbers between 0 and 1, for which accuracy, precision and recall are "
        "measured, too.",
        "warm_start_from": "path of a checkpoint, or a `WarmStartSettings`; as of `Estimator`.",
        "weight_column": "key of a feature with weights of examples, or a numeric column; None for none.",
    }
)
