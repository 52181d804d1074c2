"""Text to batches.

`documents` reads sources into documents; `corpus` holds their tokens, which `token_files` keeps on disk and
`token_writer` puts there; `packing` plans once which piece of which document goes into which row; `texts` does all that
for the sources of a run; `batches` serves the rows. Row i is a function of i alone, so that workers, hosts and resuming
cannot change what comes.
"""
