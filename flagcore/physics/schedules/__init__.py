"""Pipeline schedules: how long they take and how much they hold."""
