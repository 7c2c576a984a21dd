"""Does every method learn, and which correction rescues a run whose engines sample wrongly?"""
