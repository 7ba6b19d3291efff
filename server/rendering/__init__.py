"""What the page lets the server work out of an answer's text: LaTeX as a tree of MathML, the colours of code.

`mathml` and `highlighting` know their libraries, `worker` is the process that calls them, `renderer` starts that
process, bounds it and remembers what it said, `endpoint` is `POST /page/render`."""
