"""The programs of document 004, word for word but for their indentation, which it has lost.

Lines that it has lost end in `#+`, as in `documents`.
"""

DEVICES = """
import tensorflow as tf
import numpy as np

# Check if GPUs are available
print(f"Num GPUs Available: {len(tf.config.list_physical_devices('GPU'))}")

# Create a MirroredStrategy
strategy = tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")
"""

MODEL = """
# Create the model, optimizer, and loss function within the strategy's scope
with strategy.scope():
    model = tf.keras.Sequential([
        tf.keras.layers.Dense(256, activation='relu', input_shape=(784,)),
        tf.keras.layers.Dense(128, activation='relu'),
        tf.keras.layers.Dense(10, activation='softmax')
    ])

    model.compile(
        optimizer='adam',
        loss='sparse_categorical_crossentropy',
        metrics=['accuracy']
    )
"""

FIT = """
# Load and preprocess MNIST data
(x_train, y_train), (x_test, y_test) = tf.keras.datasets.mnist.load_data()
x_train, x_test = x_train / 255.0, x_test / 255.0
x_train = x_train.reshape(-1, 784).astype('float32')
x_test = x_test.reshape(-1, 784).astype('float32')

# Create tf.data.Dataset
batch_size = 64 * strategy.num_replicas_in_sync # Scale batch size by number of replicas
train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(10000).batch(batch_size)
test_dataset = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(batch_size)

# Train the model
model.fit(train_dataset, epochs=5)

# Evaluate the model
eval_loss, eval_accuracy = model.evaluate(test_dataset)
print(f'Evaluation accuracy: {eval_accuracy:.3f}')
"""

TPU = """
# Only run this on a TPU runtime (like in Colab)
resolver = tf.distribute.cluster_resolver.TPUClusterResolver()
tf.config.experimental_connect_to_cluster(resolver)
tf.tpu.experimental.initialize_tpu_system(resolver)

strategy = tf.distribute.TPUStrategy(resolver)
print(f"Number of TPU devices: {strategy.num_replicas_in_sync}")
"""

WORKERS = """
import json
import os
import tensorflow as tf

# Set the TF_CONFIG for this worker
os.environ["TF_CONFIG"] = json.dumps({
    "cluster": {
        "worker": ["worker0.example.com:12345", "worker1.example.com:12345"]
    },
    "task": {"type": "worker", "index": 0}
})

# Create the strategy
strategy = tf.distribute.MultiWorkerMirroredStrategy()

# Rest of the code follows the same pattern as before
"""

SERVERS = """
import json  #+
import os  #+
import tensorflow as tf  #+
# Setting TF_CONFIG for a parameter server setup
os.environ["TF_CONFIG"] = json.dumps({
    "cluster": {
        "worker": ["worker0.example.com:12345", "worker1.example.com:12345"],
        "ps": ["ps0.example.com:12345", "ps1.example.com:12345"]
    },
    "task": {"type": "worker", "index": 0} # Change according to the role
})

strategy = tf.distribute.experimental.ParameterServerStrategy()

# The rest follows a similar pattern, but variable handling is different
"""

CUSTOM_LOOP = """
# Prepare the dataset
(x_train, y_train), _ = tf.keras.datasets.mnist.load_data()
x_train = x_train.reshape(-1, 784).astype('float32') / 255.0

# Create tf.data.Dataset and distribute it
batch_size = 64 * strategy.num_replicas_in_sync
train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(10000).batch(batch_size)
dist_dataset = strategy.experimental_distribute_dataset(train_dataset)

# Create the model within strategy scope
with strategy.scope():
    model = tf.keras.Sequential([
        tf.keras.layers.Dense(256, activation='relu', input_shape=(784,)),
        tf.keras.layers.Dense(10)
    ])

    # Define loss and optimizer
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(0.001)

    # Define metrics
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name='train_accuracy')

# Define the training step
def train_step(inputs):
    features, labels = inputs

    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        loss = loss_fn(labels, predictions)

    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    train_accuracy.update_state(labels, predictions)
    return loss

# Define the distributed training step
@tf.function
def distributed_train_step(inputs):
    per_replica_losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

# Training loop
epochs = 5
steps_per_epoch = len(x_train) // batch_size

for epoch in range(epochs):
    total_loss = 0.0
    num_batches = 0

    # Reset metrics for each epoch
    train_accuracy.reset_states()

    for step, batch in enumerate(dist_dataset):
        loss = distributed_train_step(batch)
        total_loss += loss
        num_batches += 1

        if step % 100 == 0:
            print(f"Epoch {epoch+1}, Step {step}, Loss: {loss:.4f}")

    # Print epoch results
    print(f"Epoch {epoch+1}, Loss: {total_loss/num_batches:.4f}, Accuracy: {train_accuracy.result():.4f}")
"""

TRANSFER_LEARNING = """
import tensorflow as tf
import tensorflow_datasets as tfds

# Create a MirroredStrategy
strategy = tf.distribute.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

# Load and prepare the dataset
batch_size = 32 * strategy.num_replicas_in_sync
dataset, info = tfds.load('cats_vs_dogs', with_info=True, as_supervised=True)
train_dataset = dataset['train']

def preprocess(image, label):
    image = tf.image.resize(image, (224, 224))
    image = tf.keras.applications.resnet50.preprocess_input(image)
    return image, label

train_dataset = train_dataset.map(preprocess).shuffle(1000).batch(batch_size)

# Create the model within strategy scope
with strategy.scope():
    base_model = tf.keras.applications.ResNet50(
        weights='imagenet',
        include_top=False,
        input_shape=(224, 224, 3)
    )
    base_model.trainable = False # Freeze the base model

    model = tf.keras.Sequential([
        base_model,
        tf.keras.layers.GlobalAveragePooling2D(),
        tf.keras.layers.Dense(1, activation='sigmoid')
    ])

    model.compile(
        optimizer=tf.keras.optimizers.Adam(0.0001),
        loss='binary_crossentropy',
        metrics=['accuracy']
    )
start = base_model.get_weights()  #+

# Train the model
history = model.fit(train_dataset, epochs=5)
frozen, head = base_model.get_weights(), model.layers[-1].get_weights()  #+

# Fine-tune the model
with strategy.scope():
    # Unfreeze some layers
    base_model.trainable = True
    for layer in base_model.layers[:-10]:
        layer.trainable = False

    model.compile(
        optimizer=tf.keras.optimizers.Adam(0.00001), # Lower learning rate
        loss='binary_crossentropy',
        metrics=['accuracy']
    )
kept = model.layers[-1].get_weights()  #+

# Continue training
history = model.fit(train_dataset, epochs=5)
"""

CREATE_MODEL = """
def create_model():  #+
    return tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])  #+
"""

TOO_LATE = """
# Wrong: This will create variables outside the strategy scope
model = create_model()
with strategy.scope():
    model.compile(optimizer='adam', loss='mse') # Too late!
"""

IN_TIME = """
# Correct: Create and compile within strategy scope
with strategy.scope():
    model = create_model()
    model.compile(optimizer='adam', loss='mse')
"""

CHECKPOINTS = """
# Use ModelCheckpoint callback with proper settings
callbacks = [
tf.keras.callbacks.ModelCheckpoint(
    filepath='/tmp/checkpoint',
    save_weights_only=True,
    verbose=1
)
]
model.fit(train_dataset, callbacks=callbacks)
"""

MIXED_PRECISION = """
import tensorflow as tf  #+
# Enable mixed precision
policy = tf.keras.mixed_precision.Policy('mixed_float16')
tf.keras.mixed_precision.set_global_policy(policy)

# Then create your strategy and model as usual
"""

PREFETCH = """
train_dataset = train_dataset.cache().prefetch(tf.data.AUTOTUNE)
"""

SEEDS = """
import random  #+
import numpy as np  #+
import tensorflow as tf  #+
def set_seeds(seed=42):
    tf.random.set_seed(seed)
    np.random.seed(seed)
    random.seed(seed)

set_seeds()
strategy = tf.distribute.MirroredStrategy()
"""
