"""Objects that a setting names: a built-in name such as `grpo`, or the user's `module:name`.

    LOSSES = Registry({"ppo_clip": "freewheel.trainer.losses:ppo_clip"}, example="my_losses:cispo")

    LOSSES.find("algorithm.loss", "ppo_clip")         # built in
    LOSSES.find("algorithm.loss", "my_losses:cispo")  # imported

    with kept_in_memory({"score": score}):             # an object that no file has: a lambda, a notebook's function
        find_object("reward.function", "in_memory:score")

A module that cannot be found and a module that raises while it is imported are both a `ConfigError` with the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from freewheel.errors import ConfigError

T = TypeVar("T")

DETAIL_CHARS = 300
"""How much of a foreign exception's message is shown: some carry a whole file."""
IN_MEMORY = "in_memory"
"""The module name of an object that was given in Python. It exists in the processes of a run and in no file."""

_in_memory: dict[object, Mapping[str, Any]] = {}
"""The objects of each user: a run and evaluations, which may overlap in any order."""


class Registry(Generic[T]):
    """Built-in objects by name, each as its `module:name`, which is imported when it is needed."""

    def __init__(self, entries: Mapping[str, str], *, example: str = "my_module:name") -> None:
        """`example`: a `module:name` for the message about an unknown name."""
        self._entries = dict(entries)
        self._example = example

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over the built-in names."""
        return iter(self._entries)

    def check(self, key: str, spec: str) -> None:
        """Refuse a `spec` that is neither a built-in name nor of the form `module:name`. Imports nothing."""
        if spec not in self._entries and not all(spec.partition(":")[::2]):
            known = ", ".join(self._entries)
            raise ConfigError(key, spec, f"choose {known}, or give module:name of your own, such as {self._example}")

    def find(self, key: str, spec: str) -> T:
        """Return the built-in object named `spec`, or the object at `module:name`. `key` is the setting's name."""
        self.check(key, spec)
        return cast("T", find_object(key, self._entries.get(spec, spec)))


def find_object(key: str, spec: str) -> Any:
    """Return the object at `module:name`, or `module:name.attribute`. `key` is the setting's name."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise ConfigError(key, spec, "give module:name, such as my_package.rewards:score")
    if module_name == IN_MEMORY:
        if attribute not in (known := objects_in_memory()):
            argument = "reward=the_function" if key == "reward.function" else f"{{{key!r}: the_object}}"
            remedy = (
                "this object was given in Python and is in no file. Give it again in Python, "
                f"freewheel.Run(folder).resume({argument}), or name one in a file: {key}=module:name"
            )
            raise ConfigError(key, spec, remedy)
        return known[attribute]
    if module_name.endswith(".py") or "/" in module_name:
        remedy = "give the module's name and not its file, as in my_rewards:score, with its folder on PYTHONPATH"
        raise ConfigError(key, spec, remedy)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            remedy = f"importing {module_name} failed: {error}. Install what it needs"
        else:
            remedy = f"there is no module {error.name}: check its name, and that it is installed or on PYTHONPATH"
        raise ConfigError(key, spec, remedy) from error
    except Exception as error:  # a user's module may raise anything
        remedy = f"importing {module_name} failed: {type(error).__name__}: {str(error)[:DETAIL_CHARS]}"
        raise ConfigError(key, spec, remedy) from error
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        there = sorted(name for name, one in vars(module).items() if callable(one) and not name.startswith("_"))
        remedy = f"the module {module_name} has no {attribute}; it has {', '.join(there) or 'nothing to call'}"
        raise ConfigError(key, spec, remedy) from error


@contextmanager
def kept_in_memory(objects: Mapping[str, Any]) -> Iterator[None]:
    """Let `in_memory:name` find these objects in this process while the block lasts."""
    user = object()
    _in_memory[user] = dict(objects)
    try:
        yield
    finally:
        del _in_memory[user]


def receive_in_memory(objects: Mapping[str, Any]) -> None:
    """Let `in_memory:name` find these objects in this process from now on. The processes of a run call it."""
    _in_memory[object()] = dict(objects)


def objects_in_memory() -> dict[str, Any]:
    """Return the objects that `in_memory:name` finds in this process, to send them to another process."""
    return {name: one for objects in list(_in_memory.values()) for name, one in objects.items()}
