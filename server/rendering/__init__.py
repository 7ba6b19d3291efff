"""Server-side rendering of an answer's text for the page: LaTeX as a tree of MathML, the colours of code.

`mathml` and `highlighting` wrap their libraries, `worker` is the process that calls them, `renderer` starts that
process, limits it and caches its answers, `endpoint` is `POST /page/render`."""
