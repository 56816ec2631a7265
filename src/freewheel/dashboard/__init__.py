"""What people look at: the terminal view of a run. It reads snapshots and records, and changes nothing."""
