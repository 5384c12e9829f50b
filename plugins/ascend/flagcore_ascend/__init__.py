"""Huawei Ascend NPUs as a flagcore plugin."""
