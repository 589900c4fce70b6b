package snapshot

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/oci"
)

// pages keeps pairs of pages equal while it changes both all the time: it writes a pair, half of it by another process, and looks
// at all of them. A line of its input has it say how many rounds there have been, and how many times a pair was not equal.
const pages = `
import mmap, os, select
PAIRS, PAGE = 512, 4096
shared = mmap.mmap(-1, 2 * PAIRS * PAGE)
(hear, order), (done, tell) = os.pipe(), os.pipe()
def put(pair, half, n): shared[(2 * pair + half) * PAGE:(2 * pair + half + 1) * PAGE] = n.to_bytes(8, "little") * (PAGE // 8)
if os.fork() == 0:
    os.close(order)
    while b := os.read(hear, 16):
        put(int.from_bytes(b[:8], "little"), 1, int.from_bytes(b[8:], "little"))
        os.write(tell, b"x")
    os._exit(0)
rounds = unequal = 0
while True:
    rounds += 1
    pair = rounds * 7 % PAIRS
    put(pair, 0, rounds)
    os.write(order, pair.to_bytes(8, "little") + rounds.to_bytes(8, "little"))
    os.read(done, 1)
    for p in range(rounds % 16, PAIRS, 16):
        if shared[2 * p * PAGE:(2 * p + 1) * PAGE] != shared[(2 * p + 1) * PAGE:(2 * p + 2) * PAGE]: unequal += 1
    ready, _, _ = select.select([0], [], [], 0)
    if ready and os.read(0, 100): print(rounds, unequal, flush=True)
`

// rounds asks for how many rounds there were, after some more, and sees that all pairs were equal.
func (b *box) rounds(after string) string {
	b.Helper()
	said := after
	for range 3 { // each pair is looked at within 16 rounds
		s.Eventually(b, 20*time.Second, b.id+" goes on", func() bool {
			_, err := b.in.WriteString("say\n")
			must(b, err)
			line := strings.Fields(b.line())
			if len(line) != 2 || line[1] != "0" {
				b.Fatalf("%s: rounds and unequal pairs: %q", b.id, line)
			}
			longer := said != line[0]
			said = line[0]
			return longer
		})
	}
	return said
}

// TestEqualPages: pages that a program keeps equal, under load, are equal in each snapshot, and in what goes on from it.
func TestEqualPages(t *testing.T) {
	saves := 6
	if os.Getenv("CUBE_TEST_LONG") != "" {
		saves = 100
	}
	st := store(t)
	client, ctx := connect(t)
	b := newBox(t, client, ctx, "pages", oci.WithProcessArgs("python3", "-c", pages)).run(ctx, "")
	at := b.rounds("")
	shim := b.shim(ctx)
	for n := range saves {
		name, err := shim.Save(ctx, "", "")
		must(t, err)
		at = b.rounds(at)
		if n%4 == 1 { // a restore takes far longer than a save
			clone := newBox(t, client, ctx, fmt.Sprint("clone-", n)).run(ctx, checkpointOf(t, name, b.id))
			clone.rounds("")
			clone.end(ctx)
		}
		_, err = st.Delete(name)
		must(t, err)
	}
	b.end(ctx)
}
