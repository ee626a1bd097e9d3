"""The page is one file: what it runs is named in its policy, and what it shows stands in it."""

import base64
import hashlib
import html
import json
import re

from unisono.watch.web._page import make_page, policy

HOSTILE = "</script><script>alert(1)</script><!-- {{data}} \u2028 &amp;"


def data_in(page):
    """The data that a page holds."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_texts_of_a_job_come_back_as_they_are_and_end_no_element():
    page = make_page(HOSTILE, {"job": {"title": HOSTILE}, "logs": {"worker:0": HOSTILE}})
    assert data_in(page) == {"job": {"title": HOSTILE}, "logs": {"worker:0": HOSTILE}}
    assert "alert(1)</script>" not in page
    assert page.count("<script") == 2
    assert re.findall("<title>(.*?)</title>", page) == [html.escape(HOSTILE)]


def test_the_policy_allows_the_own_script_and_style_alone():
    page = make_page("train.py", {"job": None})
    (meta,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)
    assert html.unescape(meta) == policy()
    for kind, pattern in (("script", r"<script>(.*?)</script>"), ("style", r"<style>(.*?)</style>")):
        (text,) = re.findall(pattern, page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy()
    assert "default-src 'none'" in policy()
    assert "unsafe" not in policy()


def test_nothing_is_loaded_from_elsewhere_and_the_page_is_small():
    page = make_page("train.py", {"job": None})
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")
    # No handlers or styles in attributes, which the policy forbids.
    assert not re.search(r"<[^>]+ (on\w+|style)=", page.partition("<script>")[0])
    assert len(page.encode()) < 80_000
