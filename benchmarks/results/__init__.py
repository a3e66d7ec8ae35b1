"""The results pages: what the records say, in Markdown, and nothing that they do not say.

`pages` puts them together, `catalog` says which record is shown how, and each other module renders the
records of one kind. A record that the catalog does not know is shown by `generic`. No figure stands in these
sources; the bars that figures are held against are in `aims`::

    python -m benchmarks.results --to DIRECTORY
"""
