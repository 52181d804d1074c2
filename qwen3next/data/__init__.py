"""Text to batches.

`documents` reads sources into documents; `corpus` holds their tokens, `token_files` on disk; `packing` plans once which
piece of which document goes into which row; `pipeline` serves rows as batches. Row i is a function of i alone, so that
workers, hosts and resuming cannot change what comes.
"""
