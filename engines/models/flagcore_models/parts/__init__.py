"""Kinds of parts of a model beside the mixers and networks of its layers. Each module is one kind."""
