"""The use of a batch's rows by a traced function: the rules, and readers of traces."""
