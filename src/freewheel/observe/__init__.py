"""The recording side: spans, metrics, sinks, alerts, the log. Imported by every package, and imports none of them.

    trainer, rollouter, queue, sync ── values ──▶ Recorder ──▶ metrics.jsonl (always)
                                                     ├──▶ sinks: TensorBoard, Weights & Biases, Prometheus
                                                     └──▶ alerts ──▶ fully_async_training.log

Nothing in here may end or hold up a training run: a full disk, a dead service or a broken sink costs rows, and says so.
"""
