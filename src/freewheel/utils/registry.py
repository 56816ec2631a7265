"""`find_object`: what a setting names as `module:name`, such as a task, a reward function or a class.

A module that raises while it is imported is the setting's fault as much as one that is not there: both are a
`ConfigError` with the key. `get_task`, `load_reward` and the components of a run call it.
"""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from typing import Any

from freewheel.errors import ConfigError

DETAIL_CHARS = 300
"""Of an exception's message: some carry a whole file."""


def find_object(key: str, spec: str) -> Any:
    """The object at `module:name`, or `module:name.attribute`."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise ConfigError(key, spec, "give module:name, such as my_package.rewards:score")
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
