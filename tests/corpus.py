"""Plain text of the tests' own: the tiny tokenizer is trained on it, tiny prompts are made of its words."""

TEXT = """\
The harbour was quiet before the first boats came back from the night. A woman in a green coat counted
the crates of fish and wrote the number on a small card. When the sun came up, the market opened, and
people from the hills bought bread, onions, apples and salt. Nobody asked how deep the water was, but
every child knew where the stones were. In the evening the teacher explained why the tide rises twice a
day: the moon pulls the sea, the earth turns under it, and the water has to follow. Her pupils drew two
circles and a line between them. Please write a short letter to your neighbour about the broken fence.
Explain what happened, suggest a day for the repair, and offer to pay one half of the cost. How many
eggs are left when three dozen are packed and seven break? What is the difference between a river and a
canal? List five things to check before a long journey. A good plan has a beginning, a limit and
somebody who cares about the result. First measure, then cut. If the answer is longer than the question,
read the question again. Translate this sentence into another language and keep its tone. The train
leaves at nine, the bus at ten, and the ferry when the captain has finished her tea. def area(width,
height): return width * height. for item in items: print(item). if count == 0: raise an error. Two
friends talk about the weather: one likes rain because the garden needs it, the other wants a dry road.
Winter is coming, said the baker, so we need more wood, more flour and a better lock on the door of the
shed.
"""
