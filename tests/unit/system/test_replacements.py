"""What the library replaces in classes of Keras and JAX: all of it by its tables, and undone."""

import json
import subprocess
import sys

#: Prints which attributes of Keras' and JAX' classes and modules are others in the end that no table has
#: replaced, and which are others when all is undone.
WATCHED = """
import gc, json, sys, types
import jax, keras, unisono
from unisono._system import _replacements
import jax.core, jax.nn, jax.scipy
owners = [o for o in gc.get_objects() if isinstance(o, type) or isinstance(o, types.ModuleType)]
def name_of(o):
    return o.__name__ if isinstance(o, types.ModuleType) else f"{o.__module__}.{o.__qualname__}"
owners = {name_of(o): o for o in owners if name_of(o).startswith(("keras.", "jax."))}
def all_of():
    return {(n, k): v for n, o in owners.items() for k, v in list(vars(o).items())}
def changed(before):
    after = all_of()
    return {key for key, value in after.items() if before.get(key, None) is not value}
before = all_of()
import unisono.tf
recorded = set()
for owner, name in _replacements.replaced():
    recorded.add((name_of(owner), name))
# Modules that are imported later, annotations that are evaluated, and caches.
passed = {"__doc__", "__abstractmethods__", "__warningregistry__", "_abc_impl", "__annotations__"}
def shown(found):
    return sorted(
        f"{owner}.{name}" for owner, name in found
        if name not in passed and not isinstance(vars(owners[owner]).get(name), types.ModuleType)
    )
others = shown(changed(before) - recorded)
_replacements.undo()
print(json.dumps([others, shown(changed(before)), len(recorded)]))
"""


def test_every_replacement_of_keras_and_jax_is_in_a_table_and_can_be_undone():
    run = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    others, left, count = json.loads(run.stdout.splitlines()[-1])
    assert not others
    assert not left
    assert count > 100
