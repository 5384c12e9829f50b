"""Pipeline schedules: their properties, the order of their passes, and a simulation."""
