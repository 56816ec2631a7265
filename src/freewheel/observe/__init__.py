"""The recording side: spans, metrics, sinks, alerts, log, trace, samples. Imported by every package, and imports none.

    trainer, rollouter, queue, sync ── values ──▶ Recorder ──▶ metrics.jsonl (always)
      │ │                                            ├──▶ sinks: TensorBoard, Weights & Biases, Prometheus
      │ │                                            └──▶ alerts ──▶ fully_async_training.log, log.jsonl
      │ └── spans, phases of groups ──▶ Tracer ──▶ trace/NAME-PID.jsonl
      └── groups, now and then ──▶ Samples ──▶ samples/NAME-PID.jsonl

Nothing in here may end or hold up a training run: a full disk, a dead service or a broken sink costs rows, and says so.
"""
