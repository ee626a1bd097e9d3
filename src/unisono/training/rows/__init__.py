"""What a traced function does with the rows of a batch: the rules, and what reads traces by them."""
