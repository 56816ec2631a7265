"""Between generation and training: `MessageQueue`, and the decisions in it: `StalenessPolicy`, `Ledger`, `Router`."""
