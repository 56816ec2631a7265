"""The terminal view of a run and its web page. They read what is recorded and change nothing."""
