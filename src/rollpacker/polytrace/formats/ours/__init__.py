"""Our own formats: traces, journals, run folders."""
