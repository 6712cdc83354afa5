"""One release: the window that sums, the charge, the noise, and the ranks that share the work."""
