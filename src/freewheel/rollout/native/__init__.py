"""The native engine: continuous batching over Hugging Face decoders, on a CPU or one GPU, in this process.

engine.py      NativeEngine: its thread, the commands to it, the watch over it
loop.py        the scheduler (which sample gets which slot) and one turn of decoding
runner.py      the model and its tensors: one prefill per prompt, one decode step for all slots
cache.py       keys and values in pages, and the attention over them
sampling.py    draws that depend only on (seed, token index)
support.py     which models it can run, a test of their numbers, new weights
"""
