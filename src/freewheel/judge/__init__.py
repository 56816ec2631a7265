"""One request to an LLM judge, and a million of them."""
