"""Timings of parts of memjax on the machine at hand, as plain figures."""
