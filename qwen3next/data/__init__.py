"""Text to batches.

`documents` reads sources into documents; `corpus` holds their tokens, which `token_files` keeps on disk and
`token_writer` puts there; `packing` plans once which piece of which document goes into which row; `pipeline` serves
rows as batches. Row i is a function of i alone, so that workers, hosts and resuming cannot change what comes.
"""
