"""A job on a page: a server for a browser while the job runs, and the same page as a file at its end."""
