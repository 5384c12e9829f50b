"""The server of MindIE. Reads what it reports about itself."""

from flagcore_serving.launch.reports import ServerReports

REPORTS = ServerReports.read(__name__, health="/v2/health/ready")
