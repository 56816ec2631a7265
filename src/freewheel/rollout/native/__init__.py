"""The native engine: continuous batching over Hugging Face decoders, on a CPU or one GPU, in this process.

engine.py      NativeEngine: its thread, the commands to it, the scheduler and one turn of decoding
runner.py      the model: one prefill per prompt, one decode step for all slots, sampling; which models it can run
cache.py       keys and values in pages, and the attention over them
"""
