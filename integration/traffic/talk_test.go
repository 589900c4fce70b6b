package traffic

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cubesandbox/cube/integration/testhost"
)

// Where talks are.
const (
	talkPort = 7100 // on the internet: who connects talks
	boxPort  = 8080 // in a box: who connects is talked to
)

// pace is how often each end of a talk says something.
const pace = 50 * time.Millisecond

// talk is one end of a connection of which both ends say a line every now and then, with its number and what they have
// noticed: how late they are, how long they have waited for a line from this end and for a datagram back, and how many
// answers they had from where none may come.
type talk struct {
	name string
	conn net.Conn
	done sync.WaitGroup

	mu      sync.Mutex
	next    int // number of the line to come
	last    time.Time
	longest gaps
	wrong   int
	err     error // that ended it
}

// gaps are the longest since the last look.
type gaps struct {
	heard   time.Duration // between lines, at this end
	there   time.Duration // at the other end
	pong    time.Duration // between datagrams, at the other end
	lateTo  time.Duration // how late the other end was with a line, by its own clock
	lateOwn time.Duration // and this end
}

// speak begins a talk, which ends with the connection. r has what was read of it already.
func speak(t *testing.T, name string, c net.Conn, r *bufio.Reader) *talk {
	k := &talk{name: name, conn: c, last: time.Now()}
	t.Cleanup(func() {
		_ = c.Close()
		k.done.Wait()
	})
	k.done.Go(func() { k.fail(k.say()) })
	k.done.Go(func() { k.fail(k.listen(r)) })
	return k
}

func (k *talk) fail(err error) {
	_ = k.conn.Close()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err == nil {
		k.err = err
	}
}

func (k *talk) say() error {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for n, last := 0, time.Now(); ; n++ {
		k.mu.Lock()
		late := time.Since(last) - pace
		k.longest.lateOwn = max(k.longest.lateOwn, late)
		k.mu.Unlock()
		last = time.Now()
		if _, err := fmt.Fprintf(k.conn, "%d %d 0 0 0\n", n, max(0, late.Milliseconds())); err != nil {
			return err
		}
		<-tick.C
	}
}

func (k *talk) listen(r *bufio.Reader) error {
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return err
		}
		var n, late, there, pong, wrong int
		if _, err := fmt.Sscan(line, &n, &late, &there, &pong, &wrong); err != nil {
			return fmt.Errorf("it says %q: %w", line, err)
		}
		k.mu.Lock()
		expected := k.next
		k.next++
		k.longest.heard = max(k.longest.heard, time.Since(k.last))
		k.last = time.Now()
		k.longest.lateTo = max(k.longest.lateTo, time.Duration(late)*time.Millisecond)
		k.longest.there = max(k.longest.there, time.Duration(there)*time.Millisecond)
		k.longest.pong = max(k.longest.pong, time.Duration(pong)*time.Millisecond)
		k.wrong = wrong
		k.mu.Unlock()
		if n != expected {
			return fmt.Errorf("line %d comes after line %d", n, expected-1)
		}
	}
}

// look returns the longest gaps since the last look, the one that goes on included.
func (k *talk) look(t *testing.T) gaps {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err != nil {
		t.Errorf("%s has ended: %v", k.name, k.err)
	}
	if k.wrong != 0 {
		t.Errorf("%s: %d answers from where none may come", k.name, k.wrong)
		k.wrong = 0
	}
	g := k.longest
	g.heard = max(g.heard, time.Since(k.last))
	k.longest = gaps{}
	return g
}

// heard is how many lines there were of one that goes on.
func (k *talk) heard(t *testing.T) int {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err != nil {
		t.Fatalf("%s has ended: %v", k.name, k.err)
	}
	return k.next
}

// goOn waits until talks have had some more lines.
func goOn(t *testing.T, talks ...*talk) {
	t.Helper()
	const more = 20
	until := map[*talk]int{}
	for _, k := range talks {
		until[k] = k.heard(t) + more
	}
	for k, n := range until {
		s.Eventually(t, patience, fmt.Sprintf("%d more lines of %s", more, k.name), func() bool { return k.heard(t) >= n })
	}
}

// longestGap is how long a talk may be silent, but for what the machine that the test runs on has stopped for.
const longestGap = time.Second

// judge looks at the gaps of talks beside those of one that doesn't pass the host, and of their own clocks.
func judge(t *testing.T, when string, control *talk, talks ...*talk) {
	t.Helper()
	c := control.look(t)
	host := max(c.heard, c.there, c.lateTo, c.lateOwn)
	for _, k := range talks {
		g := k.look(t)
		most := s.Config.Timeout(longestGap) + host + g.lateTo
		if worst := max(g.heard, g.there, g.pong); worst > most {
			t.Errorf("%s: %s was silent for %v, at most %v is fine: %+v", when, k.name, worst, most, g)
		}
		t.Logf("%s: %s: longest gap %v here, %v there, %v of datagrams; late %v there, %v without the host", when, k.name, g.heard.Round(time.Millisecond), g.there, g.pong, g.lateTo, host.Round(time.Millisecond))
	}
}

// talkers takes those who connect to the internet's port for talks; each says its name first.
type talkers struct {
	l    net.Listener
	come chan *talk
}

func listenForTalks(t *testing.T) *talkers {
	t.Helper()
	l, err := s.Host.Internet.Listen("tcp4", netip.AddrPortFrom(testhost.Server, talkPort).String())
	must(t, err)
	w := &talkers{l: l, come: make(chan *talk, 8)}
	accepted := make(chan struct{})
	t.Cleanup(func() {
		_ = l.Close()
		<-accepted
	})
	go func() {
		defer close(accepted)
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			} else if err != nil {
				t.Errorf("accept: %v", err)
				return
			}
			_ = c.SetReadDeadline(time.Now().Add(s.Config.Timeout(patience)))
			r := bufio.NewReader(c)
			name, err := r.ReadString('\n')
			if err != nil {
				t.Errorf("somebody doesn't say a name: %v", err)
				_ = c.Close()
				continue
			}
			_ = c.SetReadDeadline(time.Time{})
			w.come <- speak(t, strings.TrimSpace(name), c, r)
		}
	}()
	return w
}

// next waits for somebody.
func (w *talkers) next(t *testing.T, name string) *talk {
	t.Helper()
	select {
	case k := <-w.come:
		if k.name != name {
			t.Fatalf("%s has come, and not %s", k.name, name)
		}
		return k
	case <-time.After(s.Config.Timeout(patience)):
		t.Fatalf("%s doesn't come", name)
		return nil
	}
}

// call has somebody in a namespace talk to the internet.
func (w *talkers) call(t *testing.T, name string, from *testhost.Namespace) *talk {
	t.Helper()
	var c net.Conn
	must(t, from.Do(func() (err error) {
		c, err = net.DialTimeout("tcp4", netip.AddrPortFrom(testhost.Server, talkPort).String(), s.Config.Timeout(patience))
		return err
	}))
	_, err := io.WriteString(c, name+"\n")
	must(t, err)
	speak(t, name, c, bufio.NewReader(c))
	return w.next(t, name)
}

// talking is a box's part: it talks to the internet and to who connects to it, has datagrams come back, and tries all the time
// to reach what it may not. Whatever comes of that is wrong, a refusal too: somebody has sent it.
const talking = `
import collections, select, socket, time
NAME, SERVER, TALK, ECHO, OWN, DENIED = %s
PACE = %d
def now(): return time.monotonic() * 1000
server = socket.create_server(("", OWN))
out = socket.create_connection((SERVER, TALK))
out.sendall((NAME + "\n").encode())
ping = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
ping.connect((SERVER, ECHO))
class End:
    said = gap = 0
    def __init__(self): self.last = now()
    def hears(self):
        self.gap, self.last = max(self.gap, now() - self.last), now()
    def took(self):
        gap, self.gap = max(self.gap, now() - self.last), 0
        return int(gap)
talks, pong = {out: End()}, End()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
tries, wrong, n, tick = collections.deque(), 0, 0, now()
while True:
    ready, answered, _ = select.select([server, ping, udp, *talks], list(tries), [], max(0, tick - now()) / 1000)
    for c in ready:
        if c is server: talks[c.accept()[0]] = End()
        elif c is ping:
            ping.recv(100)
            pong.hears()
        elif c is udp:
            udp.recv(100)
            wrong += 1
        else:
            try: more = c.recv(65536)
            except OSError: more = b""
            if more: talks[c].hears()
            else: del talks[c]
    for c in answered:
        print(c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), "is what came of", c, flush=True)
        wrong += 1
        tries.remove(c)
        c.close()
    late = now() - tick
    if late < 0: continue
    tick = now() + PACE
    pinged = pong.took()
    for c, e in talks.items():
        try: c.sendall(b"%%d %%d %%d %%d %%d\n" %% (e.said, late, e.took(), pinged, wrong))
        except OSError: continue
        e.said += 1
    ping.send(b"ping")
    to = DENIED[n %% len(DENIED)]
    n += 1
    udp.sendto(b"denied", to)
    c = socket.socket()
    c.setblocking(False)
    c.connect_ex(to)
    tries.append(c)
    if len(tries) > 60: tries.popleft().close()
`

// talkWith has a box talk, and returns the internet's end of that and the host's end of another.
func (w *talkers) talkWith(t *testing.T, b *box, denied ...netip.AddrPort) (out, in *talk) {
	t.Helper()
	var all strings.Builder
	for _, a := range denied {
		fmt.Fprintf(&all, "(%q, %d), ", a.Addr(), a.Port())
	}
	what := fmt.Sprintf("(%q, %q, %d, %d, %d, [%s])", b.id, testhost.Server, talkPort, testhost.EchoPort, boxPort, &all)
	b.start(t, fmt.Sprintf(talking, what, pace.Milliseconds()))
	out = w.next(t, b.id)
	c, err := dial(t, netip.AddrPortFrom(b.place.Address, boxPort))
	must(t, err)
	return out, speak(t, "the host's to "+b.id, c, bufio.NewReader(c))
}
