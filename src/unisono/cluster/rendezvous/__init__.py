"""The rendezvous before JAX starts: are all processes there, and do all run the same program?"""
