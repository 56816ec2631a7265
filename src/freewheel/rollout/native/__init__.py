"""The native engine: continuous batching over Hugging Face decoders, on a CPU or one GPU, in this process.

engine.py      NativeEngine: the thread, its commands, the watch over it
loop.py        a turn: admit, prefill, step, chunks, timeouts
scheduler.py   who gets which slot (pure)
runner.py      tensors: one prefill a prompt, one decode step for all slots
cache.py       the KV slots and the attention over them
pages.py       which page of them belongs to whom (pure)
flight.py      a request under way, seen from the event loop
requests.py    what a request must look like
sampling.py    draws that depend on (seed, token index) only
support.py     which models it can run
probe.py       and whether it says what they say
loading.py     new weights for a model that is running
"""

from freewheel.rollout.native.engine import NativeEngine
from freewheel.rollout.native.support import UnsupportedModel

__all__ = ["NativeEngine", "UnsupportedModel"]
