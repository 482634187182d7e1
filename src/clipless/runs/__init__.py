"""The files of a run. Each is written whole or not at all, and is on disk when the call returns.

ledger_file      the format of the ledger: JSON lines in a hash chain; `read_ledger`
contradictions   a plan against the events next to it
journal          writing the ledger: every event on disk before its result can be seen; replay after a resume
checkpoint       one file with everything needed to resume a run
run_folder       the folder of a run: which files it has, whether the run is finished, what can be resumed
durable_files    writing files atomically and flushing them to disk
fingerprint      a short digest of the exact bits of a release
"""
