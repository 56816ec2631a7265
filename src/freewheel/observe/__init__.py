"""Recording: spans, metrics, sinks, alerts, log, trace, samples. Every package may import this one; it imports none.

    trainer, rollouter, queue, sync ── values ──▶ Recorder ──▶ metrics.jsonl (always)
      │ │                                            ├──▶ sinks: TensorBoard, Weights & Biases, Prometheus
      │ │                                            └──▶ alerts ──▶ fully_async_training.log, log.jsonl
      │ └── spans, phases of groups ──▶ Tracer ──▶ trace/NAME-PID.jsonl
      └── some groups ──▶ Samples ──▶ samples/NAME-PID.jsonl

Nothing here may end or block a training run. A full disk, a dead service or a broken sink costs rows and is reported.
"""
