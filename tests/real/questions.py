"""Questions of the kinds that benchmarks ask, written for these tests: word problems, and choices with answers."""

from __future__ import annotations

WORD_PROBLEMS = [
    "Ana bakes 24 rolls and sells 17 of them. How many rolls are left?",
    "A bus carries 38 people. At a stop 9 get off and 14 get on. How many people are on it now?",
    "A pencil costs 3 dollars and a ruler costs twice as much. What do one of each cost together?",
    "Tom reads 15 pages a day. How many pages does he read in two weeks?",
    "A box holds 6 bottles. How many boxes are needed for 90 bottles?",
    "Lena saves 12 dollars a week. After how many weeks does she have 144 dollars?",
    "A farmer has 7 rows with 13 trees each. How many trees does he have?",
    "A train leaves at 9:40 and arrives at 11:05. How many minutes does the trip take?",
    "Half of the 56 pupils of a school walk to it, and a quarter cycle. How many come otherwise?",
    "A shirt of 40 dollars is sold for 25% less. What does it cost now?",
    "Three friends share 51 marbles equally. How many does each of them get?",
    "A tank of 200 litres is filled by 8 litres a minute. How many minutes does that take?",
    "Max is 4 years older than Ida, who is 11. How old will Max be in 6 years?",
    "A recipe for 4 people takes 300 grams of rice. How many grams are needed for 10 people?",
    "A rectangle is 9 metres long and 5 metres wide. How long is its edge all around?",
    "Of 80 seats 65 are sold at 12 dollars each. How many dollars were taken?",
    "Nia runs 3 kilometres on each of 5 days, and 8 on Saturday. How far does she run?",
    "A clock loses 2 minutes a day. How many minutes does it lose in June?",
    "A shelf holds 18 books. There are 5 shelves, and 11 places are free. How many books are there?",
    "Paul has 5 coins of 20 cents and 7 of 10 cents. How many cents does he have?",
]

# Question, choices, the letter of the right one.
CHOICES = [
    ("Which of these gives light of its own?", ["the Moon", "the Sun", "a mirror", "a glass of water"], "B"),
    ("What do plants take from the air?", ["iron", "salt", "carbon dioxide", "sand"], "C"),
    ("Which animal lays eggs?", ["a hen", "a dog that lives on a farm", "a cow", "a horse"], "A"),
    ("At what temperature does water freeze?", ["100 degrees Celsius", "0 degrees Celsius", "37 degrees", "50"], "B"),
    ("What pulls a dropped stone to the ground?", ["wind", "light", "gravity", "the sound it makes"], "C"),
    ("Which part of a plant takes up water?", ["the roots", "the flowers in spring", "its seeds", "leaves"], "A"),
    ("Why do we see lightning before we hear it?", ["light is faster than sound", "it is hot", "rain", "clouds"], "A"),
    (
        "What does a metal do when it is heated?",
        ["it burns", "it expands a little", "it rusts", "it turns to wood"],
        "B",
    ),
]
