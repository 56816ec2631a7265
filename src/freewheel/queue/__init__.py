"""Between generation and training: `MessageQueue`, and what decides in it: `StalenessPolicy`, `Ledger`, routing."""
