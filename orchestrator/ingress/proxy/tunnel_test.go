package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/cubesandbox/cube/orchestrator/ingress"
)

const envdToken = "0123456789abcdef"

// newPortWorld has a sandbox with a port where what is said comes back in capitals when all is said.
func newPortWorld(t *testing.T) *world {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fmt.Fprint(c, "hello\n")
				said, err := io.ReadAll(c)
				if err == nil {
					fmt.Fprint(c, strings.ToUpper(string(said)))
				}
			}()
		}
	}()
	c := newControl()
	w := worldOf(t, c, c, l.Addr())
	w.route.Secure, w.route.EnvdToken = true, envdToken
	w.route = c.put(w.route)
	return w
}

// tunnel asks for one, with more lines of a header.
func (w *world) tunnel(t *testing.T, host string, lines ...string) (net.Conn, *bufio.Reader, *http.Response) {
	t.Helper()
	c := w.raw(t, strings.Join(append([]string{"GET / HTTP/1.1", "Host: " + host, "Connection: Upgrade", "Upgrade: " + ingress.TunnelProtocol}, lines...), "\r\n")+"\r\n\r\n")
	br := bufio.NewReader(c)
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c, br, resp
}

func TestTunnel(t *testing.T) {
	w := newPortWorld(t)
	c, br, resp := w.tunnel(t, w.host(), "X-Access-Token: "+envdToken)
	if resp.StatusCode != http.StatusSwitchingProtocols || resp.Header.Get("Upgrade") != ingress.TunnelProtocol {
		t.Fatal(resp.Status, resp.Header)
	}
	if line, err := br.ReadString('\n'); line != "hello\n" || err != nil { // before the client has said anything
		t.Fatal(line, err)
	}
	if _, err := io.WriteString(c, "how are you"); err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(br); string(rest) != "HOW ARE YOU" || err != nil {
		t.Errorf("%q, %v", rest, err)
	}
	eventually(t, "a stream is left", func() bool { return w.streams() == 0 })
}

// TestTunnelCut: what is open ends with the sandbox's machine.
func TestTunnelCut(t *testing.T) {
	w := newPortWorld(t)
	_, br, _ := w.tunnel(t, w.host(), "X-Access-Token: "+envdToken)
	if line, err := br.ReadString('\n'); line != "hello\n" || err != nil {
		t.Fatal(line, err)
	}
	r := w.route
	r.Epoch = "e2"
	w.put(r)
	if rest, err := io.ReadAll(br); len(rest) > 0 || err != nil && !isReset(err) {
		t.Errorf("%q, %v", rest, err)
	}
	eventually(t, "a stream is left", func() bool { return w.streams() == 0 })
}

// TestTunnelRefused: without the sandbox's own token there is none, whatever else a request has.
func TestTunnelRefused(t *testing.T) {
	w := newPortWorld(t)
	token := "X-Access-Token: " + envdToken
	closed := strings.Replace(w.host(), w.port, "1", 1)
	envd := strings.Replace(w.host(), w.port, "49983", 1)
	for name, c := range map[string]struct {
		host   string
		lines  []string
		change func(*ingress.Route)
		status int
		says   string
	}{
		"no token":        {host: w.host(), status: 403, says: "needs the sandbox's access token"},
		"wrong token":     {host: w.host(), lines: []string{token + "x"}, status: 403, says: "is invalid"},
		"a traffic token": {host: w.host(), lines: []string{"E2b-Traffic-Access-Token: " + envdToken}, status: 403, says: "needs the sandbox's access token"},
		"not secure":      {host: w.host(), lines: []string{token}, change: func(r *ingress.Route) { r.Secure, r.EnvdToken = false, "" }, status: 403, says: "isn't secure"},
		"envd's port":     {host: envd, lines: []string{token}, status: 403, says: "envd's port"},
		"a closed port":   {host: closed, lines: []string{token}, status: 502, says: "port is not open"},
		"a body":          {host: w.host(), lines: []string{token, "Content-Length: 3\r\n\r\nabc"}, status: 400, says: "without a body"},
		"no sandbox":      {host: strings.Replace(w.host(), id, "inone", 1), lines: []string{token}, status: 502, says: "was not found"},
		"asleep": {host: w.host(), lines: []string{token + "x"}, change: func(r *ingress.Route) {
			r.State, r.AutoResume = "paused", true
			r.Addr = ingress.Route{}.Addr
		}, status: 403, says: "is invalid"},
	} {
		t.Run(name, func(t *testing.T) {
			r := w.route
			if c.change != nil {
				c.change(&r)
			}
			r = w.put(r)
			eventually(t, "the route isn't taken", func() bool {
				_, is := w.proxy.table.usable(id)
				return is.Seq == r.Seq || !r.Open() && is.Seq == 0
			})
			_, br, resp := w.tunnel(t, c.host, c.lines...)
			defer resp.Body.Close()
			b, _ := io.ReadAll(resp.Body)
			_ = br
			if resp.StatusCode != c.status || !strings.Contains(string(b), c.says) {
				t.Errorf("%s %s", resp.Status, b)
			}
		})
	}
}
