"""`rollout.engine=native`: a Hugging Face decoder in the rollouter's own process."""

from __future__ import annotations

from freewheel.rollout.engines import EngineFactory, EngineSettings, LoadedEngine, PromptsTooLong
from freewheel.rollout.models import load_causal_lm

REFILL_SHARE = 8
"""An eighth of the slots is refilled at a time: a prefill costs half a step, for one sample as for thirty."""


def refill_slots(slots: int) -> int:
    return max(1, slots // REFILL_SHARE)


class NativeFactory(EngineFactory):
    """On a CPU or one GPU."""

    def refill_slots(self, slots: int) -> int:
        return refill_slots(slots)

    def load(self, settings: EngineSettings) -> LoadedEngine:
        from freewheel.rollout.native.engine import NativeEngine

        model = load_causal_lm(settings.model_path, settings.dtype, trust_remote_code=settings.trust_remote_code).to(
            settings.device
        )
        longest, new = settings.prompt_limit(model.config), settings.max_new_tokens
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if positions is not None and longest + new > positions:
            raise PromptsTooLong(settings.asked_prompt_tokens, prompt=longest, response=new, positions=positions)
        engine = NativeEngine(
            model,
            slots=settings.slots,
            max_prompt_tokens=longest,
            max_new_tokens=new,
            version=settings.version,
        )
        return LoadedEngine(engine=engine, generation_config=model.generation_config)
