package guests

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// maxSilence is how long a line may be kept. The datapath forgets a connection after 3 hours on which nothing comes, and then there
// would be no answer.
const maxSilence = 2 * time.Hour

// kept is a line. The machine's kernel has the other end of its connection, and nobody else's takes what comes on it.
type kept struct {
	g      *Guests
	addr   netip.Addr
	conn   net.Conn
	in     *bufio.Reader
	silent time.Time // since then
}

// Line opens a line to envd, which has answered on it.
func (g *Guests) Line(ctx context.Context, addr netip.Addr) (lifecycle.Line, error) {
	ctx, cancel := context.WithTimeout(ctx, g.Timeout(attempt))
	defer cancel()
	// No kernel on the way is to ask whether the other is still there: a machine that stands still doesn't answer.
	conn, err := (&net.Dialer{KeepAlive: -1}).DialContext(ctx, "tcp", net.JoinHostPort(addr.String(), strconv.Itoa(Port)))
	if err != nil {
		return nil, line(err)
	}
	k := &kept{g: g, addr: addr, conn: conn, in: bufio.NewReader(io.LimitReader(conn, 2*maxAnswer))}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url(addr, Port, "/health"), nil)
	if err == nil {
		err = k.say(ctx, req)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return k, nil
}

// Init tells envd who the sandbox is.
func (k *kept) Init(ctx context.Context, i lifecycle.Init) error {
	if d := time.Since(k.silent); d > maxSilence {
		return line(fmt.Errorf("nothing was said on the line for %v", d.Round(time.Minute)))
	}
	ctx, cancel := context.WithTimeout(ctx, k.g.Timeout(attempt))
	defer cancel()
	req, err := newInit(ctx, k.addr, i)
	if err != nil {
		return err
	}
	return k.say(ctx, req)
}

// Close ends it.
func (k *kept) Close() error { return k.conn.Close() }

// say sends a request and waits for success.
func (k *kept) say(ctx context.Context, req *http.Request) error {
	stop := context.AfterFunc(ctx, func() { _ = k.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := req.Write(k.conn); err != nil {
		return line(err)
	}
	resp, err := http.ReadResponse(k.in, req)
	if err != nil {
		return line(err)
	}
	_, err = success(resp)
	k.silent = time.Now()
	return err
}
