"""`Scaffold`, `Saver` and `init_from_checkpoint`: with which values variables begin, and how they are saved.

Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/train/Scaffold
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono.checkpoint._reader import load_checkpoint
from unisono.estimator._train_op import require_call
from unisono.estimator.hooks._hook import check_feed
from unisono.estimator.session._saving import assign_from

#: Variables, or a part of them by the names that they have in a checkpoint.
Variables = Mapping[str, keras.Variable] | Sequence[keras.Variable]


class Saver:
    """Says how the checkpoints of a training are kept, and from which names variables are restored.

    Args:
        var_list: dict of variables by the names from which `evaluate` and `predict` restore them, such as
            `ExponentialMovingAverage.variables_to_restore()`, or sequence of variables. Variables that a dict
            lacks, and all of a sequence, have their own names. A training saves and restores all variables
            by their own names.
        reshape: must be False.
        sharded: bool; has no effect.
        max_to_keep: whole number; how many checkpoints are kept. 0 or None for all.
        keep_checkpoint_every_n_hours: hours; of the older checkpoints, one in so many hours is kept, too.
        name: string; has no effect.
        options: other arguments of TensorFlow 1; they have no effect.

    Raises:
        ContextError: the call is outside of a model_fn.
        UnsupportedError: `reshape` is True.
    """

    def __init__(
        self,
        var_list: Variables | None = None,
        reshape: bool = False,
        sharded: bool = False,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000.0,
        name: str | None = None,
        **options: object,
    ) -> None:
        store = require_call("tf.train.Saver").store
        if reshape:
            raise UnsupportedError(
                "Variables are restored in their own shapes. Received: reshape=True. Leave it out."
            )
        named = var_list if isinstance(var_list, Mapping) else {}
        #: By the path of a variable, its name in checkpoints.
        self.names = {str(store.path_of(variable)): key for key, variable in named.items()}
        chosen = named or {str(store.path_of(v)): v for v in (store.used if var_list is None else var_list)}
        self._variables = dict(chosen)
        self.max_to_keep = max_to_keep
        self.keep_checkpoint_every_n_hours = keep_checkpoint_every_n_hours

    def restore(self, sess: object, save_path: str | os.PathLike[str]) -> None:
        """Give the variables the values of a checkpoint, in `Scaffold(init_fn=...)`.

        Args:
            sess: any value; has no effect.
            save_path: path of the checkpoint.

        Raises:
            CheckpointMismatchError: the checkpoint lacks a variable, or has it in another shape.
        """
        assign_from(save_path, {name: [variable] for name, variable in self._variables.items()})

    def save(self, sess: object, save_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> str:
        """Raise an error: the Estimator saves.

        Args:
            sess: any value; has no effect.
            save_path: any value; has no effect.
            args: further values; have no effect.
            kwargs: further values; have no effect.

        Returns:
            Never.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "An Estimator saves its checkpoints itself. Received: a call of `Saver.save`. Set "
            "`RunConfig(save_checkpoints_steps=...)`, or call `session.save()` in a hook."
        )


class Scaffold:
    """A model_fn's actions before the first step, and how checkpoints are kept.

    Args:
        init_op: any value; has no effect, because there is no graph.
        init_feed_dict: must be None.
        init_fn: function of this object and a session, called once when variables have their first values,
            but not where a checkpoint is restored. It may assign variables.
        ready_op: any value; has no effect.
        ready_for_local_init_op: any value; has no effect.
        local_init_op: any value; has no effect.
        summary_op: any value; has no effect.
        saver: `Saver`; None for what the `RunConfig` says.
        copy_from_scaffold: `Scaffold` whose `init_fn` and `saver` this one gets where it has none.
        local_init_feed_dict: must be None.

    Raises:
        UnsupportedError: `init_feed_dict` or `local_init_feed_dict` is not None.

    >>> Scaffold(init_fn=lambda scaffold, session: None).saver is None
    True
    """

    def __init__(
        self,
        init_op: object = None,
        init_feed_dict: object = None,
        init_fn: Callable[[Scaffold, Any], Any] | None = None,
        ready_op: object = None,
        ready_for_local_init_op: object = None,
        local_init_op: object = None,
        summary_op: object = None,
        saver: Any = None,
        copy_from_scaffold: Scaffold | None = None,
        local_init_feed_dict: object = None,
    ) -> None:
        check_feed(init_feed_dict)
        check_feed(local_init_feed_dict)
        self.init_op, self.local_init_op, self.summary_op = init_op, local_init_op, summary_op
        self.ready_op, self.ready_for_local_init_op = ready_op, ready_for_local_init_op
        self.init_fn, self.saver = init_fn, saver
        if copy_from_scaffold is not None:
            self.init_fn = init_fn or copy_from_scaffold.init_fn
            self.saver = saver or copy_from_scaffold.saver

    def finalize(self) -> Scaffold:
        """Return this object.

        Returns:
            The `Scaffold` itself.
        """
        return self


def init_from_checkpoint(
    ckpt_dir_or_file: str | os.PathLike[str], assignment_map: Mapping[str, object] | Sequence[Any]
) -> None:
    """Let variables of a model_fn begin with the values of a checkpoint, where none is restored.

    Args:
        ckpt_dir_or_file: path of the checkpoint, or of a directory of checkpoints.
        assignment_map: dict, or sequence of pairs, from names in the checkpoint to variables, lists of
            variables, or names of variables; or from scopes in the checkpoint to scopes of the model_fn, both
            with a slash at the end, `"/"` for all.

    Raises:
        ContextError: the call is outside of a model_fn.
        CheckpointMismatchError: the checkpoint lacks a variable, or has it in another shape.
        InvalidArgumentError: a name belongs to no variable of the model_fn.
    """
    call = require_call("init_from_checkpoint")
    own = {str(call.store.path_of(v)): v for v in call.store.used}
    known = set(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map())
    pairs = assignment_map.items() if isinstance(assignment_map, Mapping) else assignment_map
    chosen: dict[str, list[keras.Variable]] = {}
    for source, target in pairs:
        for name, variable in _assigned(source, target, own, known):
            chosen.setdefault(name, []).append(variable)
    call.initializers.append(lambda variables: assign_from(ckpt_dir_or_file, chosen))


def _assigned(
    source: str, target: Any, own: Mapping[str, keras.Variable], known: set[str]
) -> list[tuple[str, keras.Variable]]:
    """Return names in a checkpoint with variables, for one entry of an `assignment_map`."""
    if not isinstance(target, str):
        return [(source, v) for v in (target if isinstance(target, (list, tuple)) else [target])]
    if not source.endswith("/"):
        if target not in own:
            raise InvalidArgumentError(
                "`assignment_map` names variables that the model_fn has made before. Received: "
                f"{target!r}; there are {sorted(own)}. Call `init_from_checkpoint` after the layers are made."
            )
        return [(source, own[target])]
    begin, scope = source.removeprefix("/"), target.removeprefix("/")
    below = [path for path in own if path.startswith(scope)]
    pairs = [(begin + path[len(scope) :], own[path]) for path in below]
    # A scope of the checkpoint must have them all; the optimizer's and the count of steps are not asked for.
    return [(name, v) for name, v in pairs if name in known or v.trainable]
