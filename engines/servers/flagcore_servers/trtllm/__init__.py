"""The server of TensorRT-LLM. Reads what it reports about itself."""

from flagcore_serving.launch.reports import ServerReports

REPORTS = ServerReports.read(__name__)
