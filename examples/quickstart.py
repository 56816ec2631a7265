"""Train the embedded model on your own rows with your own reward: python examples/quickstart.py"""

import itertools

import freewheel as fw

ASKED = "Tom has {} apples, buys {} and finds {}. How many apples is that?"
rows = [{"prompt": ASKED.format(*abc), "answer": sum(abc)} for abc in itertools.product(range(2, 10), repeat=3)]


def score(response, row):
    return float(response.endswith(f"#{row['answer']}"))


config = {"trainer.total_steps": 20, "rollout.max_new_tokens": 20}
run = fw.train(model="embedded", data=rows, reward=score, config=config)
print(f"{run.status} at step {run.steps}: mean score {run.evaluate(rows[::8]).mean:.2f} with {run.model_path}")
