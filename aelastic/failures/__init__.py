"""Why a worker died: error files, exit reasons, the report."""
