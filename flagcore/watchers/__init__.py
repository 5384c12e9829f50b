"""Watchers: plugins that send the events of a run to other tools. `flag tune --watch NAME` selects them.

They implement the hook `flagcore_on_event`, and know of flagcore only what plugins know.
"""
