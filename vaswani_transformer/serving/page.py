"""The page for people: its three files."""

from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

_FILES = {"/": ("page.html", "html"), "/page.css": ("page.css", "css"), "/page.js": ("page.js", "javascript")}
_OWN = "script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; form-action 'self'"
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; base-uri 'none'; {_OWN}",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(tags=["page"])


async def _file(request: Request) -> Response:
    name, kind = _FILES[request.scope["route"].path]
    content = (resources.files(__package__) / name).read_bytes()
    return Response(content, headers=_HEADERS, media_type=f"text/{kind}")


for _path in _FILES:
    router.add_api_route(_path, _file, include_in_schema=False)
