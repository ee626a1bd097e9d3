"""The programs of the five documents, word for word; lines that a document has lost end in `#+`.

Tests change data, sizes, devices and addresses by `changed`, and nothing else.
"""

# --- 000: the overview -------------------------------------------------------------------------------------

OVERVIEW = """
import tensorflow as tf  #+

mirrored_strategy = tf.distribute.MirroredStrategy()

every_device = mirrored_strategy  #+
mirrored_strategy = tf.distribute.MirroredStrategy(devices=["/gpu:0", "/gpu:1"])

strategy = tf.distribute.MirroredStrategy()

with strategy.scope():
  classifier = tf.keras.Sequential([
  tf.keras.layers.Conv2D(32, (3,3), activation = 'relu', input_shape = (28,28,1)),
  tf.keras.layers.MaxPooling2D(2, 2),  #+
  tf.keras.layers.Conv2D(64, (3, 3), activation='relu'),
  tf.keras.layers.Flatten(),  #+
  tf.keras.layers.Dense(64, activation = 'relu'),
  tf.keras.layers.Dense(10, activation = 'softmax')
  ])  #+
  classifier.compile(optimizer='adam', loss='sparse_categorical_crossentropy', metrics=['accuracy'])  #+
"""

# --- 001: tf.contrib.distribute ----------------------------------------------------------------------------

CONTRIB_KERAS = """
import tensorflow as tf
from tensorflow import keras

inputs = tf.keras.layers.Input(shape=(1,))
predictions = tf.keras.layers.Dense(1)(inputs)
model = tf.keras.models.Model(inputs=inputs, outputs=predictions)

features = tf.data.Dataset.from_tensors([1.]).repeat(10000).batch(10)
labels = tf.data.Dataset.from_tensors([1.]).repeat(10000).batch(10)
train_dataset = tf.data.Dataset.zip((features, labels))

distribution = tf.contrib.distribute.MirroredStrategy()

model.compile(loss='mean_squared_error',  #+
              optimizer=tf.train.GradientDescentOptimizer(learning_rate=0.2),  #+
              distribute=distribution)  #+

model.fit(train_dataset, epochs=5, steps_per_epoch=10)

eval_dataset, predict_dataset = train_dataset, features  #+
loss = \\
model.evaluate(eval_dataset, steps=1)
predicted = \\
model.predict(predict_dataset, steps=1)
"""

MODEL_FN = """
import tensorflow as tf  #+

def model_fn(features, labels, mode):
  layer = tf.layers.Dense(1)
  logits = layer(features)

  if mode == tf.estimator.ModeKeys.PREDICT:
    predictions = {"logits": logits}
    return tf.estimator.EstimatorSpec(mode, predictions=predictions)

  loss = tf.losses.mean_squared_error(
      labels=labels, predictions=tf.reshape(logits, []))

  if mode == tf.estimator.ModeKeys.EVAL:
    return tf.estimator.EstimatorSpec(mode, loss=loss)

  if mode == tf.estimator.ModeKeys.TRAIN:
    train_op = tf.train.GradientDescentOptimizer(0.2).minimize(loss)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

def input_fn():
  features = tf.data.Dataset.from_tensors([[1.]]).repeat(100)
  labels = tf.data.Dataset.from_tensors(1.).repeat(100)
  return tf.data.Dataset.zip((features, labels))

eval_input_fn = input_fn  #+
"""

ESTIMATOR = """
distribution = tf.contrib.distribute.MirroredStrategy()
config = tf.estimator.RunConfig(train_distribute=distribution)
classifier = tf.estimator.Estimator(model_fn=model_fn, config=config)
classifier.train(input_fn=input_fn)  #+
metrics = \\
classifier.evaluate(input_fn=input_fn)  #+
"""

#: The environment of worker 1 in a cluster with parameter servers.
WITH_SERVERS = """
import json  #+
import os  #+
os.environ["TF_CONFIG"] = json.dumps({  #+
    "cluster": {
        "worker": ["host1:port", "host2:port", "host3:port"],
        "ps": ["host4:port", "host5:port"]
    },  #+
   "task": {"type": "worker", "index": 1}
})  #+
"""

#: The environment of worker 0 in the walk-through.
WORKERS = """
import json  #+
import os  #+
os.environ["TF_CONFIG"] = json.dumps({
    "cluster": {
        "worker": ["host1:port", "host2:port", "host3:port"]
    },  #+
   "task": {"type": "worker", "index": 0}
})  #+
"""

MODEL_MAIN = """
def model_main():
  distribution = tf.contrib.distribute.CollectiveAllReduceStrategy(
      num_gpus_per_worker=2)  #+
  config = tf.estimator.RunConfig(train_distribute=distribution)
  estimator = tf.estimator.Estimator(model_fn=model_fn, config=config)
  train_spec = tf.estimator.TrainSpec(input_fn=input_fn)
  eval_spec = tf.estimator.EvalSpec(input_fn=eval_input_fn)
  tf.estimator.train_and_evaluate(estimator, train_spec, eval_spec)
  return estimator  #+

# Call the model_main function defined above.
estimator = \\
model_main()  #+
"""

STANDALONE = """
distribution = tf.contrib.distribute.CollectiveAllReduceStrategy(
    num_gpus_per_worker=2)  #+
config = tf.estimator.RunConfig(
    experimental_distribute=tf.contrib.distribute.DistributeConfig(  #+
        train_distribute=distribution,  #+
        remote_cluster={"worker": ["host1:port", "host2:port", "host3:port"]}))
estimator = tf.estimator.Estimator(model_fn=model_fn, config=config)
train_spec = tf.estimator.TrainSpec(input_fn=input_fn)
eval_spec = tf.estimator.EvalSpec(input_fn=eval_input_fn)
results = \\
tf.estimator.train_and_evaluate(estimator, train_spec, eval_spec)
"""

# --- 002: the Keras tutorial -------------------------------------------------------------------------------

KERAS_TUTORIAL = """
from __future__ import absolute_import, division, print_function, unicode_literals
# Import TensorFlow
import tensorflow as tf  #gpu
import tensorflow_datasets as tfds

import os

datasets, ds_info = tfds.load(name='mnist', with_info=True, as_supervised=True)
mnist_train, mnist_test = datasets['train'], datasets['test']

strategy = tf.distribute.MirroredStrategy()
print ('Number of devices: {}'.format(strategy.num_replicas_in_sync))

# You can also do ds_info.splits.total_num_examples to get the total
# number of examples in the dataset.

num_train_examples = ds_info.splits['train'].num_examples
num_test_examples = ds_info.splits['test'].num_examples

BUFFER_SIZE = 10000  #+

BATCH_SIZE_PER_REPLICA = 64  #+
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

def scale(image, label):
  image = tf.cast(image, tf.float32)
  image /= 255

  return image, label

train_dataset = mnist_train.map(scale).shuffle(BUFFER_SIZE).batch(BATCH_SIZE)
eval_dataset = mnist_test.map(scale).batch(BATCH_SIZE)

with strategy.scope():
  model = tf.keras.Sequential([
      tf.keras.layers.Conv2D(32, 3, activation='relu', input_shape=(28, 28, 1)),
      tf.keras.layers.MaxPooling2D(),  #+
      tf.keras.layers.Flatten(),  #+
      tf.keras.layers.Dense(64, activation='relu'),
      tf.keras.layers.Dense(10, activation='softmax')
  ])  #+

  model.compile(loss='sparse_categorical_crossentropy',  #+
                optimizer=tf.keras.optimizers.Adam(),  #+
                metrics=['accuracy'])  #+

# Define the checkpoint directory to store the checkpoints

checkpoint_dir = './training_checkpoints'
# Name of the checkpoint files
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt_{epoch}")
# Function for decaying the learning rate.
# You can define any decay function you need.
def decay(epoch):
  if epoch < 3:
    return 1e-3
  elif epoch >= 3 and epoch < 7:
    return 1e-4
  else:  #+
    return 1e-5
# Callback for printing the LR at the end of each epoch.
class PrintLR(tf.keras.callbacks.Callback):
  def on_epoch_end(self, epoch, logs=None):
    print ('\\nLearning rate for epoch {} is {}'.format(
        epoch + 1, tf.keras.backend.get_value(model.optimizer.lr)))
callbacks = [
    tf.keras.callbacks.TensorBoard(log_dir='./logs'),  #+
    tf.keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix,  #+
                                       save_weights_only=True),  #+
    tf.keras.callbacks.LearningRateScheduler(decay),  #+
    PrintLR()  #+
]  #+

model.fit(train_dataset, epochs=10, callbacks=callbacks)

model.load_weights(tf.train.latest_checkpoint(checkpoint_dir))  #+

eval_loss, eval_acc = model.evaluate(eval_dataset)
print ('Eval loss: {}, Eval Accuracy: {}'.format(eval_loss, eval_acc))

path = 'saved_model/'
tf.keras.experimental.export_saved_model(model, path)

unreplicated_model = tf.keras.experimental.load_from_saved_model(path)

unreplicated_model.compile(  #+
    loss='sparse_categorical_crossentropy',  #+
    optimizer=tf.keras.optimizers.Adam(),  #+
    metrics=['accuracy'])  #+

eval_loss, eval_acc = unreplicated_model.evaluate(eval_dataset)
print ('Eval loss: {}, Eval Accuracy: {}'.format(eval_loss, eval_acc))

with strategy.scope():  #+
  replicated_model = tf.keras.experimental.load_from_saved_model(path)  #+
  replicated_model.compile(loss='sparse_categorical_crossentropy',  #+
                           optimizer=tf.keras.optimizers.Adam(),  #+
                           metrics=['accuracy'])  #+

  eval_loss, eval_acc = replicated_model.evaluate(eval_dataset)  #+
  print ('Eval loss: {}, Eval Accuracy: {}'.format(eval_loss, eval_acc))  #+
"""

# --- 003: the page on MirroredStrategy ---------------------------------------------------------------------

MIRRORED_VARIABLE = """
import tensorflow as tf  #+

strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
with strategy.scope():
  x = tf.Variable(1.)
variable = x  #+

x = []
@tf.function  # Wrap the function with tf.function.
def create_variable():
  if not x:
    x.append(tf.Variable(1.))  #+
  return x[0]
strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
with strategy.scope():
  _ = create_variable()
  created = x[0]  #+
"""

#: What the page shows of a variable.
SHOWN_VARIABLE = r"""MirroredVariable:\{
  0: <\S*Variable .*shape=\(\) dtype=float32, numpy=1.0>,
  1: <\S*Variable .*shape=\(\) dtype=float32, numpy=1.0>
\}"""

MIRRORED_LOOP = """
EPOCHS = 2  #+
dataset = tf.data.Dataset.range(7).batch(4)  #+
my_strategy = tf.distribute.MirroredStrategy()
with my_strategy.scope():
  def distribute_train_epoch(dataset):
    def replica_fn(input):
      # process input and return result
      result = tf.reduce_sum(input)  #+
      return result

    total_result = 0
    for x in dataset:
      per_replica_result = my_strategy.run(replica_fn, args=(x,))
      total_result += my_strategy.reduce(tf.distribute.ReduceOp.SUM,
                                         per_replica_result, axis=None)
    return total_result

  dist_dataset = my_strategy.experimental_distribute_dataset(dataset)
  results = []  #+
  for _ in range(EPOCHS):
    train_result = distribute_train_epoch(dist_dataset)
    results.append(train_result)  #+

with_ops = tf.distribute.MirroredStrategy(  #+
    cross_device_ops=tf.distribute.HierarchicalCopyAllReduce())  #+
"""

TASK_OF_THE_CLUSTER = """
import json  #+
import os  #+
os.environ['TF_CONFIG'] = json.dumps({
  'cluster': {  #+
      'worker': ["localhost:12345", "localhost:23456"],  #+
      'ps': ["localhost:34567"]  #+
  },  #+
  'task': {'type': 'worker', 'index': 0}  #+
})  #+

# This implicitly uses TF_CONFIG for the cluster and current task info.  #+
strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy()  #+

seen = []  #+
if strategy.cluster_resolver.task_type == 'worker':  #+
  # Perform something that's only applicable on workers. Since we set this  #+
  # as a worker above, this block will run on this particular instance.  #+
  seen.append('worker')  #+
elif strategy.cluster_resolver.task_type == 'ps':  #+
  # Perform something that's only applicable on parameter servers.  #+
  seen.append('ps')  #+
"""
