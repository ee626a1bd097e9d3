"""Event files read back by TensorBoard's own loaders."""

import sys
import types

# TensorBoard's loaders import TensorFlow where it is installed, unless this module is there.
sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))


def read(directory):
    """`{tag: [(step, array), ...]}` of all files in a directory, and `{tag: plugin}`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    accumulator = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    accumulator.Reload()
    values, plugins = {}, {}
    for tag in accumulator.Tags()["tensors"]:
        events = accumulator.Tensors(tag)
        values[tag] = [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in events]
        plugins[tag] = accumulator.SummaryMetadata(tag).plugin_data.plugin_name
    return values, plugins


def scalars(directory, tag):
    """The `(step, number)` pairs of a tag, by step."""
    values, _ = read(directory)
    return sorted((step, float(value)) for step, value in values.get(tag, []))
