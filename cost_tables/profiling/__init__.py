"""The profiler of `cost_tables.profile_sps`: times real rounds of a server and fits a table."""
