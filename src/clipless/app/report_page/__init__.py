"""`clipless report --html`: one self-contained page about one or several runs."""

from clipless.app.report_page.page import page, write_page

__all__ = ["page", "write_page"]
