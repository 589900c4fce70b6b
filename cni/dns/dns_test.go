package dns

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
)

func TestAnswers(t *testing.T) {
	var asked atomic.Int32
	up := upstream(t, "127.0.0.53:0", func(network string, q *dns.Msg) *dns.Msg {
		asked.Add(1)
		switch q.Question[0].Name {
		case "missing.test.":
			return new(dns.Msg).SetRcode(q, dns.RcodeNameError)
		case "mixed.test.":
			return records("mixed.test. 60 IN CNAME a.test.", "a.test. 60 IN A 192.0.2.7", "a.test. 60 IN AAAA 2001:db8::7")(network, q)
		case "service.test.":
			return records(`service.test. 60 IN HTTPS 1 . mandatory="ipv6hint" alpn="h2" ipv4hint="192.0.2.7" ipv6hint="2001:db8::7" ech="AAAA"`)(network, q)
		}
		return records(q.Question[0].Name+" 60 IN A 192.0.2.7")(network, q)
	})
	s := server(t, func(c *Config) { c.Upstreams = []netip.AddrPort{up} })
	chaos := question("version.bind.", dns.TypeTXT)
	chaos.Question[0].Qclass = dns.ClassCHAOS
	update := new(dns.Msg).SetUpdate("a.test.")
	two := question("a.test.", dns.TypeA)
	two.Question = append(two.Question, two.Question[0])
	for _, tc := range []struct {
		name    string
		q       *dns.Msg
		code    int
		answer  string // the answer section, without tabs
		forward bool
	}{
		{"address", question("a.test.", dns.TypeA), dns.RcodeSuccess, "a.test. 60 IN A 192.0.2.7", true},
		{"no such name", question("missing.test.", dns.TypeA), dns.RcodeNameError, "", true},
		{"IPv6", question("a.test.", dns.TypeAAAA), dns.RcodeSuccess, "", false},
		{"IPv6 in an answer", question("mixed.test.", dns.TypeA), dns.RcodeSuccess, "mixed.test. 60 IN CNAME a.test. a.test. 60 IN A 192.0.2.7", true},
		{"service", question("service.test.", dns.TypeHTTPS), dns.RcodeSuccess, `service.test. 60 IN HTTPS 1 . alpn="h2" ipv4hint="192.0.2.7"`, true},
		{"any", question("a.test.", dns.TypeANY), dns.RcodeRefused, "", false},
		{"transfer", question("a.test.", dns.TypeAXFR), dns.RcodeRefused, "", false},
		{"another class", chaos, dns.RcodeRefused, "", false},
		{"update", update, dns.RcodeNotImplemented, "", false},
		{"two questions", two, dns.RcodeFormatError, "", false},
		{"longest name", question(strings.Repeat(strings.Repeat("a", 61)+".", 4), dns.TypeA), dns.RcodeSuccess, strings.Repeat(strings.Repeat("a", 61)+".", 4) + " 60 IN A 192.0.2.7", true},
	} {
		for _, network := range []string{"udp", "tcp"} {
			t.Run(tc.name+" by "+network, func(t *testing.T) {
				before := asked.Load()
				a := ask(t, s, network, "10.200.0.1", tc.q, wait)
				if a == nil {
					t.Fatal("no answer")
				}
				var got []string
				for _, r := range a.Answer {
					got = append(got, strings.Fields(r.String())...)
				}
				if a.Rcode != tc.code || strings.Join(got, " ") != tc.answer {
					t.Errorf("%s: %v", dns.RcodeToString[a.Rcode], a.Answer)
				}
				if forward := asked.Load() > before; forward != tc.forward {
					t.Errorf("forwarded: %v", forward)
				}
			})
		}
	}
}

// Nobody but sandboxes is answered: not the host by the gateway's address, and not its neighbours.
func TestStrangers(t *testing.T) {
	up := upstream(t, "127.0.0.11:0", records("a.test. 60 IN A 192.0.2.7"))
	s := server(t, func(c *Config) { c.Upstreams = []netip.AddrPort{up} })
	for _, from := range []string{"192.0.2.1", gateway.String()} {
		for _, network := range []string{"udp", "tcp"} {
			if a := ask(t, s, network, from, question("a.test.", dns.TypeA), 300*time.Millisecond); a != nil {
				t.Errorf("%s by %s: %v", from, network, a)
			}
		}
	}
	if got := s.Stats(); got.Strangers != 4 || got.Queries != 0 {
		t.Errorf("%+v", got)
	}
}

// A server whose context has ended already serves nothing and fails with nothing.
func TestEndedBefore(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resolv.conf")
	s, err := New(t.Context(), Config{
		Listen: netip.AddrPortFrom(gateway, 0), Clients: pool, ResolvConf: file, Log: slog.New(slog.DiscardHandler),
		Timeout: func(d time.Duration) time.Duration { return d },
	})
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must(t, s.Serve(ctx))
}

// What doesn't fit is cut, and whole by TCP, to sandboxes and from name servers.
func TestTruncation(t *testing.T) {
	var many []string
	for i := range 100 {
		many = append(many, fmt.Sprintf("many.test. 60 IN A 192.0.2.%d", i))
	}
	up := upstream(t, "127.0.0.1:0", func(network string, q *dns.Msg) *dns.Msg {
		a := records(many...)(network, q)
		if network == "udp" {
			a.Truncate(maxUDP)
		}
		return a
	})
	s := server(t, func(c *Config) { c.Upstreams = []netip.AddrPort{up} })
	for _, tc := range []struct {
		network   string
		size      uint16
		truncated bool
		most      int
	}{{"udp", 0, true, dns.MinMsgSize}, {"udp", 4096, true, maxUDP}, {"tcp", 0, false, dns.MaxMsgSize}} {
		q := question("many.test.", dns.TypeA)
		if tc.size > 0 {
			q.SetEdns0(tc.size, false)
		}
		a := ask(t, s, tc.network, "10.200.0.1", q, wait)
		if a != nil {
			a.Compress = true // as it came
		}
		if a == nil || a.Truncated != tc.truncated || a.Len() > tc.most || !tc.truncated && len(a.Answer) != 100 {
			t.Errorf("%s of %d bytes: %v", tc.network, tc.size, a)
		}
	}
}

// Name servers that fail, in all ways, give way to one that doesn't, which is the first from then on.
func TestFailover(t *testing.T) {
	good := records("a.test. 60 IN A 192.0.2.7")
	for name, bad := range map[string]func(string, *dns.Msg) *dns.Msg{
		"silent":   func(string, *dns.Msg) *dns.Msg { return nil },
		"failing":  func(_ string, q *dns.Msg) *dns.Msg { return new(dns.Msg).SetRcode(q, dns.RcodeServerFailure) },
		"refusing": func(_ string, q *dns.Msg) *dns.Msg { return new(dns.Msg).SetRcode(q, dns.RcodeRefused) },
		"forged": func(network string, q *dns.Msg) *dns.Msg {
			a := records("a.test. 60 IN A 192.0.2.66")(network, q)
			a.Id++
			return a
		},
		"of another name": func(network string, q *dns.Msg) *dns.Msg {
			a := records("b.test. 60 IN A 192.0.2.66")(network, q)
			a.Question[0].Name = "b.test."
			return a
		},
	} {
		t.Run(name, func(t *testing.T) {
			first, second := upstream(t, "127.0.0.1:0", bad), upstream(t, "127.0.0.1:0", good)
			s := server(t, func(c *Config) { c.Upstreams = []netip.AddrPort{first, second} })
			for range 2 {
				a := ask(t, s, "udp", "10.200.0.1", question("a.test.", dns.TypeA), wait)
				if a == nil || len(a.Answer) != 1 || !strings.Contains(a.Answer[0].String(), "192.0.2.7") {
					t.Fatalf("got %v", a)
				}
			}
			if got := s.Stats(); got.Failovers != 1 {
				t.Errorf("%+v", got)
			}
		})
	}
	t.Run("all", func(t *testing.T) {
		nobody, err := net.ListenPacket("udp4", "127.0.0.1:0")
		must(t, err)
		at := nobody.LocalAddr().(*net.UDPAddr).AddrPort()
		must(t, nobody.Close())
		s := server(t, func(c *Config) { c.Upstreams = []netip.AddrPort{at} })
		if a := ask(t, s, "udp", "10.200.0.1", question("a.test.", dns.TypeA), wait); a == nil || a.Rcode != dns.RcodeServerFailure {
			t.Errorf("got %v", a)
		}
	})
}

// One sandbox's flood is cut and costs others nothing.
func TestLimits(t *testing.T) {
	release := make(chan struct{})
	up := upstream(t, "127.0.0.1:0", func(network string, q *dns.Msg) *dns.Msg {
		if q.Question[0].Name == "slow.test." {
			<-release
		}
		return records("a.test. 60 IN A 192.0.2.7")(network, q)
	})
	defer close(release)
	s := server(t, func(c *Config) {
		c.Upstreams = []netip.AddrPort{up}
		c.Timeout = func(d time.Duration) time.Duration { return 10 * d }
	})
	flood, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.ParseIP("10.200.0.1")}, net.UDPAddrFromAddrPort(s.Addr()))
	must(t, err)
	defer flood.Close()
	packed, err := question("slow.test.", dns.TypeA).Pack()
	must(t, err)
	deadline := time.Now().Add(wait)
	for s.Stats().Limited == 0 {
		if time.Now().After(deadline) {
			t.Fatal("no limit")
		}
		_, err := flood.Write(packed)
		must(t, err)
	}
	if got := s.Stats(); got.Queries > maxInFlight {
		t.Errorf("%+v", got)
	}
	// Its first query may be lost where the flood has filled the socket, like its packets.
	for {
		a := ask(t, s, "udp", "10.200.0.2", question("a.test.", dns.TypeA), time.Second)
		if a != nil && len(a.Answer) == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("another sandbox gets %v", a)
		}
	}
	var open []net.Conn
	for range maxConnections {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP("10.200.0.2")}}
		c, err := d.Dial("tcp4", s.Addr().String())
		must(t, err)
		open = append(open, c)
	}
	if a := ask(t, s, "tcp", "10.200.0.2", question("a.test.", dns.TypeA), wait); a != nil {
		t.Error("one connection more")
	}
	for _, c := range open {
		must(t, c.Close())
	}
}

func TestRate(t *testing.T) {
	c := newClients()
	a, at := netip.MustParseAddr("10.200.0.1"), time.Now()
	take := func() (n int) {
		for {
			done, ok := c.query(a, at)
			if !ok {
				return n
			}
			done()
			n++
		}
	}
	if n := take(); n != burst {
		t.Errorf("%d at once", n)
	}
	at = at.Add(time.Second)
	if n := take(); n != perSecond {
		t.Errorf("%d a second", n)
	}
	at = at.Add(time.Hour)
	for b := netip.MustParseAddr("10.200.1.0"); len(c.of) < forgetAbove; b = b.Next() {
		done, _ := c.query(b, at)
		done()
	}
	at = at.Add(time.Hour)
	if done, ok := c.query(netip.MustParseAddr("10.201.0.0"), at); !ok || len(c.of) != 1 {
		t.Errorf("%d clients are remembered", len(c.of))
	} else {
		done()
	}
}

// The host's name servers are followed as its resolv.conf is written, replaced, and led elsewhere.
func TestResolvConf(t *testing.T) {
	for i, tc := range []struct {
		name   string
		change func(file, text string) error
	}{
		{"written", func(file, text string) error { return os.WriteFile(file, []byte(text), 0o600) }},
		{"replaced", func(file, text string) error {
			if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
				return err
			}
			return os.Rename(file+".new", file)
		}},
		{"led elsewhere", func(file, text string) error {
			dir := filepath.Join(filepath.Dir(file), "run", "resolve")
			if err := os.Remove(file); err != nil {
				return err
			}
			if err := os.Symlink("run/resolve/stub.conf", file); err != nil {
				return err
			}
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, "stub.conf"), []byte(text), 0o600)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "resolv.conf")
			must(t, os.WriteFile(file, []byte("# none\nnameserver 127.0.0.53\nnameserver "+gateway.String()+"\nnameserver 10.200.0.9\nnameserver x\noptions edns0\n"), 0o600))
			s := server(t, func(c *Config) { c.ResolvConf = file })
			if got := fmt.Sprint(s.upstreams.current()); got != "[127.0.0.53:53]" {
				t.Fatalf("asked are %s", got)
			}
			to := fmt.Sprintf("127.0.1.%d", i)
			upstream(t, to+":53", records("a.test. 60 IN A 192.0.2.7"))
			must(t, tc.change(file, "nameserver "+to+"\n"))
			deadline := time.Now().Add(wait)
			for {
				a := ask(t, s, "udp", "10.200.0.1", question("a.test.", dns.TypeA), wait)
				if a != nil && a.Rcode == dns.RcodeSuccess {
					return
				}
				if time.Now().After(deadline) {
					t.Fatalf("asked are %v", s.upstreams.current())
				}
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add("nameserver 192.0.2.1\nnameserver fe80::1%eth0\n")
	f.Fuzz(func(t *testing.T, text string) {
		if list := parse(strings.NewReader(text)); len(list) > maxServers {
			t.Errorf("%d servers", len(list))
		}
	})
}
