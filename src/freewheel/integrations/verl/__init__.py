"""freewheel inside verl: `FreewheelRewardManager` for versions with a reward loop, `length_penalty` for earlier ones.

    reward.reward_manager.source=importlib
    reward.reward_manager.module.path=pkg://freewheel.integrations.verl
    reward.reward_manager.name=FreewheelRewardManager

Importing this module also registers a manager as `length_penalty` in each registry that the installed verl has. verl
imports it if the environment has `VERL_USE_EXTERNAL_MODULES=freewheel.integrations.verl`.
"""

from __future__ import annotations

import importlib.util

NAME = "length_penalty"
"""The managers' name in verl's registries."""
__all__ = ["NAME"]


def _has(module: str) -> bool:
    """Return whether verl has this module. Modules move between versions, so the parent may be missing too."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if not _has("verl"):
    raise ImportError("freewheel.integrations.verl needs verl: pip install 'freewheel[verl]'")

if _has("verl.workers.reward_manager.registry"):  # verl reads it up to 0.7.0; it still exists in 0.9
    from verl.workers.reward_manager import (  # type: ignore[import-not-found,unused-ignore]
        register as _register_legacy,
    )

    from freewheel.integrations.verl.rows import LegacyRewardManager

    _register_legacy(NAME)(LegacyRewardManager)
    __all__ += ["LegacyRewardManager"]

if _has("verl.experimental.reward_loop.reward_manager"):
    from verl.experimental.reward_loop.reward_manager import (  # type: ignore[import-not-found,unused-ignore]
        register as _register,
    )

    from freewheel.integrations.verl.manager import FreewheelRewardManager

    _register(NAME)(FreewheelRewardManager)
    __all__ += ["FreewheelRewardManager"]
